"""The online path: ranks slates for one person within milliseconds."""
