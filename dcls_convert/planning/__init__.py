"""Decisions in plain values, before a model is touched: rules, budget, the plan as data, and its
planner.
"""
