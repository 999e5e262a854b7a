"""`midstream` and `python -m midstream`: the command line, quiet when it is interrupted at its start."""

import sys


def main() -> int:
    """Run one command and return its exit status."""
    try:
        from midstream.runtime import cli  # here, so that Ctrl-C while it loads is caught

        return cli.main()
    except KeyboardInterrupt:
        print("\nmidstream: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells report it


if __name__ == "__main__":
    sys.exit(main())
