"""A function that records its calls, to be put in place of the function itself."""


def recording(function, calls):
    """Return a function that does the same, and appends its positional arguments to `calls`."""

    def call(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return call
