# Short names for the project's own commands.

.PHONY: setup quick test docs demo package

setup: ## set up .venv with all that the tests need (or use the active environment, if it has it)
	bash scripts/test.sh --setup

quick: ## lint, types, and the tests of the core's laws, in a few minutes
	bash scripts/test.sh -m quick

test: ## lint, types, and a quarter of the tests, another one for each commit
	bash scripts/test.sh

docs: ## the site of the documents, every link checked
	bash scripts/docs.sh

demo: ## methods answer the embedded demo questions in turn; prints the table
	bash eval.sh

package: ## wheel and source archive into dist/, the same bytes at every build
	bash scripts/package.sh
