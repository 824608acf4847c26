"""The run directory: its layout, the intake log, and the files that everybody reads."""
