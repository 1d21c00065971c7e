"""llama.cpp's own server, as the package xllamacpp carries it: GGUF file, name and threads in, its address out.

It runs in the peer's virtual environment until its standard input ends.
"""

import sys

import xllamacpp


def main() -> None:
    """Serve on a free port of the loopback; the last line printed on standard output is the address."""
    path, alias, threads = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = path, {alias}
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_parallel, params.n_ctx, params.warmup = 4, 4 * 512, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    # Keys, values and weights in float32, so that ids can be compared.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
