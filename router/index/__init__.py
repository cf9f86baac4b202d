"""The prefix index: which source holds which prefix, exactly.  Import the pieces from their modules."""
