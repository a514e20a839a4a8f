"""`plaudit bench`: benchmarks of this machine; each figure is shown with a limit measured in the same run."""
