"""Decisions before a model is touched, in plain values: rules, budget, plan and planner."""
