// A short program: operations of torch, and of this library, one after the other without Python between them.
//
// A value is a number, a tensor or a list. The first values are the inputs of a run; each operation adds its results.

#pragma once

#include <torch/custom_class.h>

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

namespace few_rows {

class Program : public torch::CustomClassHolder {
 public:
  // Begin an operation by its name and overload; arguments follow in the order of its schema.
  void operation(std::string name, std::string overload) {
    operations_.push_back({c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), {}});
  }
  // An argument that is the same in every run.
  void constant(c10::IValue value) { add({Kind::CONSTANT, std::move(value)}); }
  // An argument that is a value; with `is_last` no later operation reads it.
  void value(int64_t index, bool is_last) { add({is_last ? Kind::LAST : Kind::VALUE, {}, index}); }
  // An argument that is a whole number in proportion to the rows of a run.
  void rows(int64_t factor, int64_t more) { add({Kind::ROWS, {}, factor, more}); }
  // An argument that is the number of cached rows of a run.
  void length() { add({Kind::LENGTH, {}}); }
  // An argument that is a list of the next `size` arguments: tensors, or whole numbers.
  void list(int64_t size, bool is_tensors) { add({is_tensors ? Kind::TENSORS : Kind::NUMBERS, {}, size}); }
  // A value that a run returns.
  void result(int64_t index) { results_.push_back(index); }

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, int64_t num_rows, int64_t length) const {
    std::vector<c10::IValue> values(std::make_move_iterator(inputs.begin()), std::make_move_iterator(inputs.end()));
    torch::jit::Stack stack;
    for (const Operation& operation : operations_) {
      stack.clear();
      for (size_t i = 0; i < operation.arguments.size();) stack.push_back(argument(operation, i, values, num_rows, length));
      operation.handle.callBoxed(stack);
      for (c10::IValue& result : stack) {
        if (result.isTensorList()) {
          for (const at::Tensor tensor : result.toTensorList()) values.emplace_back(tensor);
        } else {
          values.push_back(std::move(result));
        }
      }
    }
    std::vector<at::Tensor> results;
    for (const int64_t index : results_) results.push_back(values[index].toTensor());
    return results;
  }

 private:
  enum class Kind { CONSTANT, VALUE, LAST, ROWS, LENGTH, TENSORS, NUMBERS };
  struct Argument {
    Kind kind;
    c10::IValue constant;
    int64_t index = 0, more = 0;
  };
  struct Operation {
    c10::OperatorHandle handle;
    std::vector<Argument> arguments;
  };

  void add(Argument argument) { operations_.back().arguments.push_back(std::move(argument)); }

  // The argument at place i, which moves on to the next one.
  static c10::IValue argument(
      const Operation& operation, size_t& i, std::vector<c10::IValue>& values, int64_t num_rows, int64_t length) {
    const Argument& found = operation.arguments[i++];
    switch (found.kind) {
      case Kind::CONSTANT:
        return found.constant;
      case Kind::VALUE:
        return values[found.index];
      case Kind::LAST:
        return std::move(values[found.index]);
      case Kind::ROWS:
        return found.index * num_rows + found.more;
      case Kind::LENGTH:
        return length;
      case Kind::TENSORS: {
        c10::List<at::Tensor> list;
        for (int64_t k = 0; k < found.index; ++k) list.push_back(argument(operation, i, values, num_rows, length).toTensor());
        return list;
      }
      default: {
        c10::List<int64_t> list;
        for (int64_t k = 0; k < found.index; ++k) list.push_back(argument(operation, i, values, num_rows, length).toInt());
        return list;
      }
    }
  }

  std::vector<Operation> operations_;
  std::vector<int64_t> results_;
};

}  // namespace few_rows
