"""Training that goes on after a failure, with the devices that there are then."""
