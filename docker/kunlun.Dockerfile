# Zooforge on Kunlun P800. UNTESTED ON THE DEVICE: it follows what is public of the vendor's image, and Zooforge's tests
# run the same versions with a stand-in for the runtime (tests/floor). From the repository's root:
#
#   docker build -f docker/kunlun.Dockerfile --build-arg BASE=<the vendor's image> -t zooforge-kunlun .
#   docker run --rm --privileged --network=host --ipc=host -v $PWD/outputs:/zooforge/outputs zooforge-kunlun
#
# The base holds Python 3.10, torch 2.5 with XPyTorch (torch_xmlir) and the vendor's Megatron plugin. None of them may
# be installed from anywhere else, so packages that would bring a torch along are installed without what they need.
ARG BASE=loongforge/loongforge_kunlun:py310_torch25
FROM ${BASE}

WORKDIR /zooforge
COPY tests/floor/requirements.txt /tmp/requirements.txt
RUN python3 -c "import sys; assert sys.version_info[:2] == (3, 10), sys.version" \
 && grep -vE '^(torch|megatron-core)==' /tmp/requirements.txt > /tmp/rest.txt \
 && (python3 -c "import megatron.core" 2>/dev/null || python3 -m pip install --no-cache-dir --no-deps "$(grep '^megatron-core==' /tmp/requirements.txt)") \
 && python3 -m pip install --no-cache-dir -r /tmp/rest.txt

COPY . .
# Zooforge itself runs from its source: its package asks for Python 3.12, what runs here keeps to 3.10.
ENV PYTHONPATH=/zooforge
CMD ["python3", "-m", "zoo", "doctor"]
