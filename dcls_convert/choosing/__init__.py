"""Compare many models, or windows and counts of one model, by what they cost, and recommend one."""
