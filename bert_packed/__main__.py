"""`python -m bert_packed COMMAND`: see `bert_packed.cli`."""

import sys

from bert_packed.cli import main

if __name__ == "__main__":
    sys.exit(main())
