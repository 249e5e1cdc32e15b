"""`python -m colibri` is the `colibri` command."""

from colibri.cli import main

main()
