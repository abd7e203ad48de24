"""Checks of ``canary doctor``: the machine, the engines, the plugins, and whether a toy pool's faults are found."""
