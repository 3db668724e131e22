"""The orders in which the devices of a pipeline run their operations, a file for each family of schedules."""
