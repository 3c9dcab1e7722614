"""Replace a regular expression in texts, as a separate program that can be killed if the expression never ends.

`caption_operations.ReplacePattern` runs it. It reads [pattern, replacement, texts] as JSON from stdin, and writes JSON
to stdout: the list of results, or a string with the error of Python's regular expressions.
"""

import json
import re
import sys


def main() -> None:
    """Replace the pattern in all texts of the request, and write the answer."""
    find, by, texts = json.load(sys.stdin.buffer)
    try:
        pattern = re.compile(find)
        answer: list[str] | str = [pattern.sub(by, text) for text in texts]
    except (re.error, IndexError) as error:
        answer = str(error)
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
