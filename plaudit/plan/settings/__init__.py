"""A plan as the settings of other projects. Names of options are facts: each project says where they were read."""
