"""parallel: each technique a function applied to a plain model from outside; `parallelize` is the one place with the order."""
