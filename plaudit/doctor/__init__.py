"""`plaudit doctor`: whether this machine, or all machines of a job, can run Plaudit; each finding with its cure."""
