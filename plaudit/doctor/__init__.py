"""`plaudit doctor`: checks whether this machine, or all machines of a job, can run Plaudit; each finding has a fix."""
