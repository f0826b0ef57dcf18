"""The words of a command line: flags, their types, help and messages."""
