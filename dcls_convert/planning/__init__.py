"""Decisions in plain values: the rules, the budget, the plan as data, and the planner that makes it.

No tensor and no module enters. Sizes, counts and budgets that do not fit are refused here, before a model is touched.
"""
