"""Medusa: trained heads that each guess one of the next tokens."""
