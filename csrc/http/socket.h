// One connected socket, read by a poller and written to at once. The rest of what it does not take is its owner's.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "common/descriptor.h"
#include "http/poller.h"

namespace pdlink::http {

class Socket : public Reader {
  public:
    ~Socket() override { close(); }

    // Reads this socket, which the caller keeps open until `close`.
    void open(std::shared_ptr<SocketPoller> poller, int socket);

    // Writes to a duplicate of this socket, and does not read it.
    void open_to_write(int socket);

    // It is neither read nor written to any more.
    void close();

    bool is_open() const { return socket_ >= 0; }

    // Reads no more, until `go_on`.
    void hold();
    void go_on();

    // How many of these bytes it took; none if it is not open. An error is the owner's to find, who sends the rest.
    std::size_t send(std::string_view head, std::string_view body = {}) const;

    bool clogged = false;  // its owner has bytes to send, so all that follows goes there, too

  private:
    std::shared_ptr<SocketPoller> poller_;
    SocketPoller::Key key_ = 0;  // 0 while it is held
    int socket_ = -1;
    Descriptor own_;  // if it is a duplicate
};

}  // namespace pdlink::http
