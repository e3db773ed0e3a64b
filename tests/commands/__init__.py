"""Commands of developers: long runs that prove, beside the tests."""
