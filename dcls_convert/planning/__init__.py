"""Decisions, in plain values: rules, budget, the plan as data, and the planner that makes one.

No tensor and no module enters. All that can be refused about sizes, counts and budgets is refused here, before a model
is touched.
"""
