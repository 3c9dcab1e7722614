"""Replace a regular expression in texts, as a separate program that can be killed if the expression never ends.

`captions.ReplacePattern` runs it. It reads [pattern, replacement, maximum characters of a result, texts] as JSON from
stdin, and writes JSON to stdout: the list of results, or a string that says what is wrong.
"""

import json
import re
import sys


def main() -> None:
    """Replace the pattern in all texts of the request, and write the answer."""
    find, by, most, texts = json.load(sys.stdin.buffer)
    try:
        pattern = re.compile(find)
        answer: list[str] | str = [pattern.sub(by, text) for text in texts]
    except (re.error, IndexError) as error:
        answer = f"{error}; it is Python's regular expressions that are meant"
    else:
        longest = max(map(len, answer), default=0)
        if longest > most:
            answer = f"makes a caption of {longest:,} characters; at most {most:,}"
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
