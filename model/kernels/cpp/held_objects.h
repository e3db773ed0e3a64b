// Whether a tree of Python objects still holds what it held, told by addresses: some thousand objects in some ten
// microseconds. Of Python's stable interface the few functions that are needed are declared here, so that its headers
// are not needed. Written for `model/kernels/held_objects.py`, which records the addresses.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" {
long PyDict_Size(void* dict);
int PyDict_Next(void* dict, long* place, void** key, void** value);
void* PyObject_Type(void* object);
void* PyObject_GenericGetDict(void* object, void* context);
long PyList_Size(void* list);
void* PyList_GetItem(void* list, long index);
int PyList_Append(void* list, void* item);
void Py_DecRef(void* object);
}

namespace held_objects {

// What an address is followed by, in its lowest bits.
enum Kind : int64_t { VALUE = 0, DICT = 1, OBJECT = 2, LIST = 3, TENSOR = 4, KINDS = 7 };

// Level by level, so that the processor can fetch what comes next while it compares: nothing of this is in its caches
// after a pass over the weights.
struct Check {
  struct Item {
    char* found;
    int64_t kind;
  };
  static constexpr size_t AHEAD = 8;
  static constexpr int KEYS_AT = 32, LINES_OF_KEYS = 6;  // of a dict in CPython; used to fetch alone

  const int64_t* recorded;
  void* tensors;  // a list: those that were met
  std::vector<Item>& queue;

  void push(void* found, int64_t kind) {
    __builtin_prefetch(found);
    queue.push_back({static_cast<char*>(found), kind});
  }

  bool value(void* found) {
    const int64_t expected = *recorded++, kind = expected & KINDS;
    if (reinterpret_cast<int64_t>(found) != (expected & ~KINDS)) return false;
    if (kind == TENSOR) return PyList_Append(tensors, found) == 0;
    if (kind != VALUE) push(found, kind);
    return true;
  }

  // A dict by its size, and the entries that were recorded: each by its place, its key and its value. An entry that
  // has moved counts as changed.
  bool dict(void* found) {
    if (PyDict_Size(found) != *recorded++) return false;
    for (int64_t rest = *recorded++; rest > 0; --rest) {
      long place = *recorded++;
      void *key, *item;
      if (!PyDict_Next(found, &place, &key, &item) || reinterpret_cast<int64_t>(key) != *recorded++) return false;
      if (!value(item)) return false;
    }
    return true;
  }

  bool list(void* found) {
    const long size = PyList_Size(found);
    if (size != *recorded++) return false;
    for (long i = 0; i < size; ++i) {
      if (!value(PyList_GetItem(found, i))) return false;
    }
    return true;
  }

  // An object by its class, and then by its attributes.
  bool object(void* found) {
    void* kind = PyObject_Type(found);
    Py_DecRef(kind);
    if (reinterpret_cast<int64_t>(kind) != *recorded++) return false;
    void* attributes = PyObject_GenericGetDict(found, nullptr);
    if (!attributes) return false;
    push(attributes, DICT);
    Py_DecRef(attributes);  // the object keeps it
    return true;
  }

  bool all(void* root) {
    queue.clear();
    push(root, LIST);
    for (size_t i = 0; i < queue.size(); ++i) {
      if (i + AHEAD < queue.size() && queue[i + AHEAD].kind == DICT) {
        const char* keys = *reinterpret_cast<char**>(queue[i + AHEAD].found + KEYS_AT);
        for (int line = 0; line < LINES_OF_KEYS; ++line) __builtin_prefetch(keys + 64 * line);
      }
      const auto [found, kind] = queue[i];
      if (!(kind == DICT ? dict(found) : kind == LIST ? list(found) : object(found))) return false;
    }
    return true;
  }
};

}  // namespace held_objects

// The places of a dict's entries, in order.
extern "C" void token_recycling_places(void* dict, int64_t* places) {
  long place = 0;
  void *key, *item;
  do {
    *places++ = place;
  } while (PyDict_Next(dict, &place, &key, &item));
}

// Whether `root`, a list, holds what was recorded; the tensors that were met are appended to `tensors`.
extern "C" int token_recycling_holds(void* root, const int64_t* recorded, void* tensors) {
  static thread_local std::vector<held_objects::Check::Item> queue;
  return held_objects::Check{recorded, tensors, queue}.all(root);
}
