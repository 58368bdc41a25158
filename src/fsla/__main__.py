"""The program `fsla`, which names in one line what to install where the extra `data` is missing."""

from __future__ import annotations

import sys

from fsla._extras import install_hint, require


def main() -> None:
    """Run the command line."""
    try:
        require("data")
        from fsla import cli
    except ModuleNotFoundError as error:
        print(f"fsla: {install_hint(error)}", file=sys.stderr)
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
