#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    vccl::fuzzing::verbs_greeter(bytes);
});
