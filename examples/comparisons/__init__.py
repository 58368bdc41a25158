"""What each example is compared with, and its picture: run by `python examples/gallery.py`."""


def accuracy(model, data):
    """Return the share of rows, in percent, whose class a model names."""
    return 100 * (model(data[0]).argmax(1) == data[1]).float().mean().item()
