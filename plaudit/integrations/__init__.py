"""What other trainers call to get rewards from `plaudit serve`, for those that take a function in place of a URL."""
