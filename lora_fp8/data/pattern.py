"""A program of its own, for `captions.ReplacePattern`: replace a regular expression in texts, killed if it never ends.

Reads [pattern, replacement, most characters of a result, texts] as JSON; answers the texts, or one line about what is
wrong.
"""

import json
import re
import sys


def main() -> None:
    """Read, replace, answer."""
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
