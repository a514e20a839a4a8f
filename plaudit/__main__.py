"""`python -m plaudit`."""

from plaudit.cli import main

main()
