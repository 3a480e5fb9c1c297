"""What stands behind the command line: its words, its parser's manners, and what each command runs."""
