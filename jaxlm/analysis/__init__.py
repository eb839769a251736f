"""What a step costs and what a run has learnt: plan, bench, show, curves."""
