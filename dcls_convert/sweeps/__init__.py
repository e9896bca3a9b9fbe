"""Compare windows and counts by cost, time and error, and recommend one."""
