// What torch's build without CUDA lacks to have tensors on a GPU that does not exist: streams and events that do nothing,
// for autograd, and hooks that say that a device is there. The tensors are those of gpu.py.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using namespace c10;

const Device gpu(DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, gpu);

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return gpu; }
  Device exchangeDevice(Device) const override { return gpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream getNewStream(Device, int = 0) const override { return stream; }
  Stream getStreamFromGlobalPool(Device, bool = false) const override { return stream; }
  Stream exchangeStream(Stream) const override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = const_cast<Device*>(&gpu);  // any address: it is only handed back
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

Guard guard;
impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);

}  // namespace

namespace at {

struct PretendedHooks : CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  void deviceSynchronize(DeviceIndex) const override {}
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedHooks);

}  // namespace at
