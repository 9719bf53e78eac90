"""What this machine and environment can run: one file an area, each line with its remedy.

Only metadata and files are read: nothing heavy is imported and nothing is started, so that it takes
a second or two.
"""
