"""Output of the commands: console, tables, plans, live progress."""
