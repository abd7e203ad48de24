"""Small engines of unmodified vLLM on a CPU, driven and broken through nothing but vLLM itself. Importing this package
does not import vLLM.
"""
