"""`compare_served`: is a running server still the baseline? Judged by the log-probabilities that its API gives.

What only shows when a model is served is seen here: a kernel that is wrong, a scale that was not found, another
tokenizer, a cache in FP8, another checkpoint than the one that was meant. The server is asked for the log-probabilities
of the tokens of a prompt (``echo`` with ``logprobs`` of OpenAI's ``/v1/completions``), so it needs no code of ours.

`answers` asks the server, `distributions` completes what it answers, `comparison` does the rest.
"""

from minifloat.evaluate.compare.served.comparison import compare_served

__all__ = ["compare_served"]
