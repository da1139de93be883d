"""The command line: `treeflash`, its options and its output.

A new command is a line in `commands.COMMANDS`, or in SUITES for `treeflash bench`. Options of settings follow from their
declarations (`arguments`), so a new setting needs nothing here.
"""
