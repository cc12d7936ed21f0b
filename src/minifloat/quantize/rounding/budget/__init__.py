"""Mixtures of formats within a budget of bits, bytes or KL divergence, chosen by measured damage.

target.py    the budget
groups.py    the groups of weights that share a format, and what each format costs
formats.py   the formats that engines load together
knapsack.py  the choice with the least damage for every cost
search.py    rounding in the cheapest format, the choice, rounding again, and the chart
"""
