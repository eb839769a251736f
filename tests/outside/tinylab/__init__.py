"""What a stranger adds to jaxlm, in a package of their own."""
