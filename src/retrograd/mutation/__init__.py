"""Mutation testing of backward passes: how many bugs would gradient tests miss?"""
