"""Windows and counts side by side: costs, times, errors, and which is recommended."""
