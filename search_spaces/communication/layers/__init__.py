"""Ready layers with a choice between functions, which is made with `places.alternatives`.

`expert.py` has an expert layer, where the search chooses how many tokens an expert takes; `attention.py` has attention
over a sequence that is split over devices, where the search chooses how far back a token sees.
"""
