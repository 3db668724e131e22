"""Models as other people write them: small ones of several libraries, trained for a few steps with a plan."""
