"""What ``canary doctor`` looks at: the machine, the engines, the plugins, and whether a toy pool's faults are found."""
