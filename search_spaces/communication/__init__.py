"""The space of communication strategies that change numbers: precision, error feedback, how often gradients go.

`sites.py` finds the collectives of a loss and `interpreter.py` runs it with others in their place; `strategies.py`
lists what can run there, made of `collectives.py` and `precision.py`; `device_step.py` runs a selection of them on each
device and `emulation.py` all devices on one; `loss_increases.py`, with `probes.py`, says what their errors would do
to the loss; `space.py` puts it together, with `groups.py` and `costs.py`.

For losses to be written with: `interpreter.alternatives` between functions of one's own, `capacity.py` an expert layer
and `window.py` attention over a split sequence, whose communication depends on what is chosen.
"""
