"""The only layer that knows which machine this is: device, ranks, process groups, random streams."""
